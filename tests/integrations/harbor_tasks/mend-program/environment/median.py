import sys

numbers = list(map(float, sys.argv[1:]))
middle = len(numbers) // 2
print(numbers[middle] if len(numbers) % 2 else (numbers[middle - 1] + numbers[middle]) / 2)
