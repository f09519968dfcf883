#!/bin/bash
head -c 64M /dev/zero > big
true
