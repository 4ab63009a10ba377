"""Floor 7: `megafp8 <verb>`, one file a verb.

A verb module holds HELP, EPILOG, add_arguments(parser) and run(args) -> exit code; its top-level imports are light
and it loads what it needs inside run, so that `--help` needs no torch.
"""
