"""What runs on a machine with a GPU: `bash tests/gpu/run.sh`, and pytest files that skip without one."""
