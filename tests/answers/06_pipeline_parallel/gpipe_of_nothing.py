# exercise: 2
# expect: no forward or backward was recorded

def gpipe(stage):
    pass
