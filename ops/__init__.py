"""The probe daemon, which reads the devices and feeds weights back to the edge, and its policies.

It speaks HTTP to the rest of the stack and nothing else, so that it may die, hang or lie without
harm: the edge checks what it says and forgets it after 5 s.
"""
