"""From samples to candidate policies, through the gate into serving."""
