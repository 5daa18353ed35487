from . import item

NAME = "tag of " + item.NAME
