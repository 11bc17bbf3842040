def check(source): pass
