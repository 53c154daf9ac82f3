"""How far one record can move what is computed from all of them, and which data sets are neighbours."""

ADJACENCIES = ("add_remove", "replace_one")
