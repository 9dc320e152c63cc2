def main(numbers):
    return {"total": sum(numbers)}
