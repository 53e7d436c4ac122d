"""What the tiny trained LongCat-2.0 is taught, how it is trained, and how it is scored."""
