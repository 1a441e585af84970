"""The whole of headrace on one thread, with a virtual clock, faults and crashes. One seed is one world."""
