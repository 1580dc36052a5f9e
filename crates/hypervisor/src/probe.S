# Firmware of a guest that proves that guests run: from real mode through protected mode into
# 64-bit mode with paging, there it counts in memory, and ends its QEMU through isa-debug-exit.
#
# Its code is in probe.bin (the jump at the reset vector is put there by probe.rs):
#   as -o probe.o probe.S
#   ld -Ttext=0 -e 0 --oformat=binary -o probe.bin probe.o
    .set BASE, 0xf0000
    .text
    .code16
start:
    cli
    movw %cs, %ax
    movw %ax, %ds
    lgdtl gdtr
    movl %cr0, %eax
    orl $1, %eax
    movl %eax, %cr0
    ljmpl $8, $(BASE + protected)
    .code32
protected:
    movw $16, %ax
    movw %ax, %ds
    movw %ax, %es
    movw %ax, %ss
    cld
    xorl %eax, %eax
    movl $0x1000, %edi
    movl $0xc00, %ecx
    rep stosl
    movl $0x2003, 0x1000
    movl $0x3003, 0x2000
    movl $0x0083, 0x3000
    movl $0x1000, %eax
    movl %eax, %cr3
    movl %cr4, %eax
    orl $0x20, %eax
    movl %eax, %cr4
    movl $0xc0000080, %ecx
    rdmsr
    orl $0x100, %eax
    wrmsr
    movl %cr0, %eax
    orl $0x80000000, %eax
    movl %eax, %cr0
    ljmpl $24, $(BASE + long)
    .code64
long:
    movl $0x10000, %ecx
again:
    incq 0x8000
    decl %ecx
    jnz again
    cmpq $0x10000, 0x8000
    jne stop
    movw $0xf4, %dx
    movb $0x10, %al
    outb %al, %dx
stop:
    hlt
    jmp stop
    .balign 8
gdt:
    .quad 0
    .quad 0x00cf9a000000ffff
    .quad 0x00cf92000000ffff
    .quad 0x00af9a000000ffff
gdtr:
    .word gdtr - gdt - 1
    .long BASE + gdt
