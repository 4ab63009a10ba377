"""`make bench`: every benchmark, peers in the same run, with few rounds; more by each one's own command."""

from __future__ import annotations

import sys

from benchmarks import (
    checkpoint_speed,
    convert,
    corpus_memory,
    corpus_peers,
    corpus_pipeline,
    fp8_quantizers,
    fp8_step,
    parallel_step,
    scaling,
    train_step,
)


def main() -> int:
    """Run them one after the other; 0 if all ran."""
    print("training step: 8 layers, hidden 512, sequence 512, micro-batch 4, BF16 and FP8 (docs/performance.md)")
    failed = train_step.main(["--fp8", "--steps", "6", *sys.argv[1:]])
    print("\nthe step in every FP8 recipe, and with statistics on")
    failed = fp8_step.main(["--steps", "4"]) or failed
    print("\nFP8 quantizers, compiled against as written")
    failed = fp8_quantizers.main(["--rounds", "5"]) or failed
    print("\nthe same model on two processes, 8 sequences a step")
    failed = parallel_step.main(["--only", "tp 2", "dp 2", "--steps", "3"]) or failed
    print("\nsaving and loading 1 GB, and saving beside steps")
    failed = checkpoint_speed.main(["--rounds", "1"]) or failed
    print("\nconversions against a plain copy of the same bytes, and their memory")
    failed = convert.main(["--gigabytes", "0.6", "--rounds", "1"]) or failed
    print("\njsonl to .bin and .idx, Megatron's loops beside (docs/corpus.md: with more text, and datatrove)")
    failed = corpus_peers.main(["--megabytes", "20"]) or failed
    print("\na whole corpus with language id, filters and MinHash, stage by stage")
    failed = corpus_pipeline.main([]) or failed
    print("\nmemory of the corpus tools")
    failed = corpus_memory.main(["--largest", "40", "--documents", "1e6"]) or failed
    print("\nhow the cost of a step grows")
    return scaling.main([]) or failed


if __name__ == "__main__":
    sys.exit(main())
