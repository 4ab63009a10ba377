"""What `make bench` runs: ratios against peers that are installed beside us, in one run."""
