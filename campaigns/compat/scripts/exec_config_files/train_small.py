# what a small training overrides
out_dir = "out-small"
n_layer = 2
learning_rate = 3e-3
