"""Measurements that print their figures; nothing here asserts one."""
