"""The outer ring of a run: callbacks that conf/callbacks/ chooses. The rest of training/ imports none of them."""
