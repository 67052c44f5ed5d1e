from vlora.cli import main

main()
