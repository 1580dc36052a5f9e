# A firmware that fills RAM and then dirties it, for tests: no BIOS, no kernel, up in milliseconds.
# Loaded at 0xffff0000 (64 KiB). Parameters (little endian words) at offset 0xff00:
#   first page, pages to fill, first hot page, hot pages, delay loops between writes
        .text
base:
        .code16
        .org 0xf000
start16:
        cli
        lgdtl %cs:gdtr
        movl %cr0, %eax
        orb $1, %al
        movl %eax, %cr0
        ljmpl $8, $(start32 - base + 0xffff0000)
        .code32
start32:
        movw $16, %ax
        movw %ax, %ds
        movw %ax, %es
        movl 0xffffff00, %edi
        movl 0xffffff04, %ecx
        shll $12, %edi
        movl %edi, %eax
fill:   testl %ecx, %ecx
        jz filled
        imull $1664525, %eax, %eax
        addl $1013904223, %eax
        movl %eax, (%edi)
        movl %eax, 2044(%edi)
        addl $4096, %edi
        decl %ecx
        jmp fill
filled: movl 0xffffff0c, %ecx
        testl %ecx, %ecx
        jz idle
        movl 0xffffff08, %esi
        shll $12, %esi
hot:    imull $1664525, %eax, %eax
        addl $1013904223, %eax
        movl %eax, %ebx
        mull %ecx
        movl %ebx, %eax
        shll $12, %edx
        incl 8(%esi,%edx)
        movl %eax, 3000(%esi,%edx)
        movl 0xffffff10, %edx
delay:  subl $1, %edx
        jnc delay
# Flush the TLB, as every kernel does all the time: QEMU before 9.0 under TCG does not see writes
# through entries that are older than its newest look at the dirty pages.
        movl %cr0, %edx
        xorl $0x10000, %edx
        movl %edx, %cr0
        jmp hot
idle:   hlt
        jmp idle
        .align 8
gdt:    .quad 0
        .quad 0x00cf9a000000ffff
        .quad 0x00cf92000000ffff
gdtr:   .word 23
        .long gdt - base + 0xffff0000
        .org 0xfff0
        .code16
        jmp start16
        .org 0x10000
