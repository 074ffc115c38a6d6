"""`kvferry disk`: look at a folder of the disk tier, check it, clean it, empty it."""
