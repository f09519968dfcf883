#!/bin/bash
. /tests/check.sh draft one
