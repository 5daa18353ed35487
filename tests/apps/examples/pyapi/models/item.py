NAME = "an item"
