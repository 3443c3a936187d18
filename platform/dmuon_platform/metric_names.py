"""The names of what is measured in a run, as its lines, MLflow and pictures have them."""

TRAIN, EVALUATION, TIME, SPEED = "train/", "evaluation/", "time/", "speed/"
SYSTEM, UPDATES = "system/", "muon/"
"""What each group of names begins with."""

TRAIN_LOSS = f"{TRAIN}loss"
GRADIENT_NORM = f"{TRAIN}grad_norm"
TOKENS = f"{TRAIN}tokens"
LEARNING_RATE = f"{TRAIN}lr_"
"""Begins those of all groups of parameters."""
NORM_MAX, NORM_MIN = f"{UPDATES}spectral_norm_max", f"{UPDATES}spectral_norm_min"
ERROR_MEAN, ERROR_MAX = f"{UPDATES}orthogonality_error_mean", f"{UPDATES}orthogonality_error_max"
CHANGE = f"{UPDATES}update_to_weight_median"

TOKENS_PER_S = f"{SPEED}tokens_per_s"

EVALUATION_LOSS = f"{EVALUATION}loss"
BITS_PER_BYTE = f"{EVALUATION}bits_per_byte"
BIGRAM_BITS_PER_BYTE = f"{EVALUATION}bigram_bits_per_byte"
"""A line to compare with: of a model that knows the byte before alone."""
