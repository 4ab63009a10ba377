"""Floor 5: a trained model at work: generate, score. What evaluation and converters judge with."""
