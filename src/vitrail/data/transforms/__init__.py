"""Augmentation: crops, flips, colours, erasing and mixing, for single images or batches.

Every parameter is drawn from `CounterRng` by functions written once for B samples: a loader process draws for one
sample, the accelerator for a batch, and both get the same numbers. The pixel operations are torchvision's and Pillow's.
"""
