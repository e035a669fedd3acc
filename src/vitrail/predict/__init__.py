"""Network, preprocessing and class names as one: images in, answers out."""
