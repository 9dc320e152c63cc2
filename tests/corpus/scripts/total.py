def main(numbers: list[int]) -> dict[str, int]:
    return {"total": sum(numbers)}
