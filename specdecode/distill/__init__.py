"""Training a draft on its target's own distributions: text, student, losses, training and the report.

Nothing here is imported by a service; what a service loads is the directory that `specdecode distill` leaves.
"""
