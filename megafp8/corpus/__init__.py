"""Floor 3: raw text -> tokens on disk, without torch: readers, split, tokenizer training, tokenizing, the run."""
