# A boot sector that writes and checks its disk for ever, by the firmware (INT 13h).
# Round n (from 0): block b = n * 0x9e3779b1 >> 20 is filled with the number n + 1 and noted in the
# table; block n * 0x85ebca6b >> 20 is read and compared with the table. Block b stands at sector
# 61 + 8 b, so every write covers two blocks of 4 KiB in part.
#   0x500: n   0x504: 0, or what went wrong (1 content, 2 error)   0x508: "DLHL" once it runs
#   0x10000: the table, 4096 numbers
# as --32 -o load.o load.S && ld -m elf_i386 -Ttext 0x7c00 --oformat binary -o load.bin load.o

    .code16
    .globl _start
_start:
    cli
    cld
    xorw %ax, %ax
    movw %ax, %ds
    movw %ax, %ss
    movw $0x7000, %sp
    movb %dl, drive
    movl $0, 0x500
    movl $0, 0x504
    movw $0x1000, %ax
    movw %ax, %es
    xorw %di, %di
    xorl %eax, %eax
    movw $4096, %cx
    rep stosl
    movl $0x4c484c44, 0x508
    sti
next:
    movl 0x500, %eax
    imull $0x9e3779b1, %eax, %ebx
    shrl $20, %ebx
    incl %eax
    movw $0x2000, %cx
    movw %cx, %es
    xorw %di, %di
    movw $1024, %cx
    rep stosl
    movw $0x2000, %bp
    movb $0x43, %ah
    call disk
    movw $0x1000, %ax
    movw %ax, %es
    movw %bx, %di
    shlw $2, %di
    movl 0x500, %eax
    incl %eax
    movl %eax, %es:(%di)
    movl 0x500, %eax
    imull $0x85ebca6b, %eax, %ebx
    shrl $20, %ebx
    movw $0x3000, %bp
    movb $0x42, %ah
    call disk
    movw $0x1000, %ax
    movw %ax, %es
    movw %bx, %di
    shlw $2, %di
    movl %es:(%di), %eax
    movw $0x3000, %cx
    movw %cx, %es
    xorw %di, %di
    movw $1024, %cx
    repe scasl
    jne wrong
    incl 0x500
    jmp next

# ah: what to do; bx: the block; bp: the segment of its content
disk:
    movw %bp, packet + 6
    movl %ebx, %ecx
    shll $3, %ecx
    addl $61, %ecx
    movl %ecx, packet + 8
    movw $packet, %si
    movb drive, %dl
    movb $0, %al
    pushl %ebx
    int $0x13
    popl %ebx
    jc failed
    ret
failed:
    movl $2, 0x504
    jmp halt
wrong:
    movl $1, 0x504
halt:
    hlt
    jmp halt

packet:
    .byte 16, 0
    .word 8, 0, 0
    .long 0, 0
drive:
    .byte 0
    .org 510
    .word 0xaa55
