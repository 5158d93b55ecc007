"""Small and medium tensors between CPU ranks of one machine, through memory that they share, in place of gloo.

gloo hands a message from thread to thread and through sockets: a sum of 64 numbers over two ranks takes 1 ms of CPU
time from each. Here a rank writes its part where the others read it, and sleeps until they have written theirs.

    futex.py       sleeping and waking, and barriers of memory order
    peers.py       which process a rank is, and whether it still lives
    segment.py     the file in memory that a group's ranks map, and what lies where in it
    meeting.py     how they find each other when the group is made
    channel.py     a group's collectives: slots, who has written, who has read
    mailbox.py     messages from one rank to another
    any_source.py  a message from whichever rank sends first
    waiting.py     a wait that sees lost ranks and the group's timeout
    poster.py      writes later what found no free slot
    ring_order.py  sums in gloo's order, so that the bits are gloo's
    collectives.py what each operation writes and reads
    replaced.py    stands in the place of torch's methods, and decides between shared memory and gloo
    record.py      the last operations, as torch's flight recorder notes gloo's

Whether an operation goes through shared memory follows from what all of its ranks know: the group, the operation, the
type, and the number of bytes. Everything else stays gloo's.
"""
