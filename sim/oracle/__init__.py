"""Bounds that a trace sets to every policy: infinite cache, LRU and Belady at each capacity."""
