"""Tar shards in the WebDataset layout, random access: `read` a folder of them, one of them, or a pattern.

Members that share their name up to the first dot are one sample: KEY.jpg (or .png, .webp, ...) is the image, KEY.cls
its class as a number, KEY.json may have the number as "label" or several as "labels"; KEY.seg.png (or KEY.mask.png) is
its mask, where pixel_classes.txt or pixel_classes.json next to the shards names the classes. Other members, KEY.txt or
KEY.trimap.png say, are left alone. An index of all this is written once, next to the shards or, where one cannot write,
into the cache; after that opening a set maps memory, whatever its size.
"""

from vitrail.data.readers.shards.reader import Shards, read

__all__ = ["Shards", "read"]
