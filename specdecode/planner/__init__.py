"""What speculation would bring on given hardware, before there is a server: rooflines, tables, pictures.

It asks the same `specdecode.cost.choose` that the router asks; only the costs come from a roofline (or from a
calibration file) instead of the running replica.
"""
