"""Work on whole data sets: an overview, packing into shards."""
