"""What a user does, with the real command and real processes."""
