"""`kvferry doctor`: what this machine has, what stands in the way, and what to do about it."""
