"""Attacks on our own machine room: cases that really try, and the verdict on each."""
