#!/bin/bash
. /tests/check.sh final "one two"
