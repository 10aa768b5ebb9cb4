"""The compiler: trace, rules, propagate, partition, passes, program."""
