#!/bin/bash
cp tries copy
