"""`moe-rl convert`: a checkpoint from one form into another, streamed."""
