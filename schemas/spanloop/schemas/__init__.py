"""Events, ids, topics, versions, errors and settings that all rooms share. Depends on nothing of ours."""
