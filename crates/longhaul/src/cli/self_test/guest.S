# The guest of the self-test: fills memory, rewrites a part of it for ever, and checks in each pass
# that every word is what it wrote there last. What it found stands in memory for others to read.
#
# Its code is in guest.bin (self_test/guest.rs puts it into an image of 64 KiB, at 0xf000):
#   as --32 -o guest.o guest.S
#   ld -m elf_i386 -Ttext=0xf000 -e 0 --oformat=binary -o guest.bin guest.o
        .set ROM, 0xffff0000
        .set STATUS, 0x8000             # name, passes, errors, then the first: where, wanted, found
        .set NAME, 0x5453484c
        .set HOT_FIRST, 0x100000        # rewritten in each pass
        .set HOT_PAGES, 512
        .set COLD_FIRST, 0x300000       # written once, a few checked in each pass
        .set COLD_PAGES, 8192
        .set COLD_PER_PASS, 64
        .set FACTOR, 1664525
        .set STEP, 1013904223
        .text
        .code16
start16:
        cli
        lgdtl %cs:gdtr
        movl %cr0, %eax
        orb $1, %al
        movl %eax, %cr0
        ljmpl $8, $(start32 + ROM)
        .code32
start32:
        movw $16, %ax
        movw %ax, %ds
        movw %ax, %es
        movw %ax, %ss
        movl $0x7000, %esp
        xorl %edx, %edx                 # what is added to a word's address times FACTOR
        movl $HOT_FIRST, %edi
        movl $(HOT_PAGES + COLD_PAGES), %ecx
fill:   imull $FACTOR, %edi, %eax
        movl %eax, (%edi)
        leal 2044(%edi), %ebx
        imull $FACTOR, %ebx, %eax
        movl %eax, (%ebx)
        leal 4092(%edi), %ebx
        imull $FACTOR, %ebx, %eax
        movl %eax, (%ebx)
        addl $4096, %edi
        decl %ecx
        jnz fill
        xorl %esi, %esi                 # the next cold page
        movl $NAME, STATUS
pass:   movl $HOT_FIRST, %edi
        movl $HOT_PAGES, %ecx
hot:    movl %edi, %ebx
        call rewrite
        leal 2044(%edi), %ebx
        call rewrite
        leal 4092(%edi), %ebx
        call rewrite
        addl $4096, %edi
        decl %ecx
        jnz hot
        addl $STEP, %edx
        movl $COLD_PER_PASS, %ecx
cold:   movl %esi, %edi
        shll $12, %edi
        addl $COLD_FIRST, %edi
        pushl %edx
        xorl %edx, %edx
        movl %edi, %ebx
        call check
        leal 2044(%edi), %ebx
        call check
        leal 4092(%edi), %ebx
        call check
        popl %edx
        incl %esi
        andl $(COLD_PAGES - 1), %esi
        decl %ecx
        jnz cold
        incl STATUS + 4
        movl $1000000, %ecx
delay:  decl %ecx
        jnz delay
# Flush the TLB, as every kernel does all the time: QEMU before 9.0 under TCG does not see writes
# through entries that are older than its newest look at the dirty pages.
        movl %cr0, %eax
        xorl $0x10000, %eax
        movl %eax, %cr0
        jmp pass

# The word at EBX: was it the last one written there?
check:  imull $FACTOR, %ebx, %eax
        addl %edx, %eax
        cmpl %eax, (%ebx)
        je good
        incl STATUS + 8
        cmpl $1, STATUS + 8
        jne good
        movl %ebx, STATUS + 12
        movl %eax, STATUS + 16
        movl (%ebx), %ebp
        movl %ebp, STATUS + 20
good:   ret
rewrite:
        call check
        addl $STEP, %eax
        movl %eax, (%ebx)
        ret
        .balign 8
gdt:    .quad 0
        .quad 0x00cf9a000000ffff
        .quad 0x00cf92000000ffff
gdtr:   .word 23
        .long gdt + ROM
