"""Floor 6. Two elastic launches: a tuning job whose workers the study steers, then the real job as torchrun would."""
