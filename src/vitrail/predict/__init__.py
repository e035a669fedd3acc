"""Network, preprocessing and class names as one: pictures in, answers out."""
