"""From gradients to parameters: clip, learning rate, AdamW with fp32 masters. Importing it is light."""
