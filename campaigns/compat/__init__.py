"""Training scripts as users write them, with the libraries they use: each is tuned and launched, beside torchrun."""
