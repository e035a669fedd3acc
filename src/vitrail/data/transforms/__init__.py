"""What training does to images: crops, flips, colours, erasing, mixing; one image at a time or in batches.

Every parameter is drawn from `CounterRng`, by functions written once for B samples: a loader process asks for one, the
accelerator for a batch, and both get the same. The pixels are torchvision's and Pillow's business.
"""
