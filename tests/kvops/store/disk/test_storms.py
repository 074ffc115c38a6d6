"""Owners of a folder that are killed; the script says what is checked."""


def test_owners_killed_anywhere(storm):
    said = storm("disk/storm_disk.py", "--runs", 20)
    assert "20 owners killed" in said
    assert "0 wrong bytes loaded" in said
