//! Tests arbitrary input in arbitrary pieces: the result or error is always the same, in bounded
//! memory.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use longhaul_qemu_stream::return_path::{self, Message, ReturnPathError};
use longhaul_qemu_stream::{
    Content, Event, Limits, Page, ParseError, Parser, Prelude, RamBlock, Writer,
};
use proptest::collection::vec;
use proptest::prelude::*;

const LIMITS: Limits = Limits {
    prelude_bytes: 4096,
    blocks: 8,
    block_bytes: 1 << 30,
    device_state_bytes: 20_000,
};

/// Returns all events and errors of a parser for bytes that arrive in pieces.
fn read(stream: &[u8], cuts: &[usize]) -> (Vec<Event>, Option<ParseError>) {
    let mut parser = Parser::new(LIMITS);
    let mut events = Vec::new();
    for mut input in pieces(stream, cuts) {
        loop {
            match parser.next(&mut input) {
                Ok(Some(event)) => {
                    if let Event::Prelude(_) = event {
                        parser.keep(1);
                    }
                    events.push(event);
                }
                Ok(None) => {
                    assert!(input.is_empty());
                    break;
                }
                Err(error) => return (events, Some(error)),
            }
        }
    }
    (events, None)
}

fn read_back(stream: &[u8], cuts: &[usize]) -> (Vec<Message>, Option<ReturnPathError>) {
    let mut parser = return_path::Parser::new(1 << 16);
    let mut messages = Vec::new();
    for mut input in pieces(stream, cuts) {
        loop {
            match parser.next(&mut input) {
                Ok(Some(message)) => messages.push(message),
                Ok(None) => {
                    assert!(input.is_empty());
                    break;
                }
                Err(error) => return (messages, Some(error)),
            }
        }
    }
    (messages, None)
}

fn pieces<'a>(stream: &'a [u8], cuts: &[usize]) -> Vec<&'a [u8]> {
    let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut % (stream.len() + 1)).collect();
    cuts.extend([0, stream.len()]);
    cuts.sort_unstable();
    let ends = cuts.windows(2);
    ends.map(|pair| &stream[pair[0]..pair[1]]).collect()
}

fn prelude() -> Prelude {
    let block = |name: &str, pages: u64| RamBlock {
        name: name.to_owned(),
        used_bytes: pages * 4096,
    };
    let blocks = vec![
        block("pc.ram", 200),
        block("pc.bios", 4),
        block("/rom@etc/acpi/tables", 2),
    ];
    let bytes = Writer::prelude("pc-q35-10.0", 2, &blocks);
    // The section's mark, id, and name.
    let section = bytes
        .windows(9)
        .position(|at| at == b"\x01\0\0\0\x02\x03ram");
    Prelude {
        bytes,
        commands: section.unwrap(),
        machine_type: "pc-q35-10.0".to_owned(),
        ram_section: 2,
        blocks,
    }
}

fn page_event() -> impl Strategy<Value = Event> {
    (0..3_usize, any::<u64>(), any::<Option<u8>>()).prop_map(|(block, page, byte)| {
        let content = match (byte, block) {
            (None, _) => Content::Zero,
            (Some(byte), 1) => Content::Kept(Box::new([byte; 4096])),
            (Some(_), _) => Content::Skipped,
        };
        let page = page % prelude().blocks[block].pages();
        Event::Page {
            block,
            page,
            content,
        }
    })
}

/// Generates the events of a whole stream.
fn events() -> impl Strategy<Value = Vec<Event>> {
    let sections = vec(vec(page_event(), 0..6), 1..5);
    let state = vec(
        prop_oneof![4 => any::<u8>(), 1 => Just(0_u8), 1 => Just(6), 1 => Just(b'{')],
        0..2000,
    );
    (sections, state, any::<bool>()).prop_map(|(sections, mut state, newer)| {
        let mut events = vec![Event::Prelude(prelude())];
        let last = sections.len() - 1;
        for (index, pages) in sections.into_iter().enumerate() {
            if index == last && newer {
                events.extend([Event::Ping(7), Event::SwitchoverStart]);
            }
            events.push(Event::SectionStart {
                last: index == last,
            });
            events.extend(pages);
            events.push(Event::SectionEnd);
        }
        state.extend(b"\0\x06\0\0\0\x08{\"a\":{}}");
        events.push(Event::DeviceState(state));
        events
    })
}

fn write(events: &[Event]) -> Vec<u8> {
    let mut writer = Writer::new(&prelude());
    let mut out = Vec::new();
    for event in events {
        match event {
            Event::Prelude(prelude) => out.extend(&prelude.bytes),
            Event::SectionStart { last } => writer.section_start(*last, &mut out),
            Event::Page {
                block,
                page,
                content,
            } => {
                let content: Option<&Page> = match content {
                    Content::Zero => None,
                    Content::Kept(content) => Some(content),
                    Content::Skipped => Some(&[0xa5; 4096]),
                };
                assert!(writer.page(*block, *page, content, &mut out));
            }
            Event::SectionEnd => writer.section_end(&mut out),
            Event::Ping(value) => writer.ping(*value, &mut out),
            Event::SwitchoverStart => writer.switchover_start(&mut out),
            Event::DeviceState(bytes) => out.extend(bytes),
        }
    }
    out
}

fn message() -> impl Strategy<Value = Message> {
    let name = "[a-z./@]{1,40}";
    prop_oneof![
        any::<u32>().prop_map(Message::Shut),
        any::<u32>().prop_map(Message::Pong),
        any::<u32>().prop_map(Message::ResumeAck),
        Just(Message::SwitchoverAck),
        (proptest::option::of(name), any::<u64>(), any::<u32>()).prop_map(
            |(block, offset, length)| Message::RequestPages {
                block,
                offset,
                length
            }
        ),
        (name, vec(any::<u8>(), 0..300))
            .prop_map(|(block, bitmap)| Message::ReceivedBitmap { block, bitmap }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn a_stream_in_any_pieces_says_what_was_written(
        events in events(),
        cuts in vec(any::<usize>(), 0..40),
    ) {
        let stream = write(&events);
        let (found, error) = read(&stream, &cuts);
        prop_assert_eq!(error, None);
        prop_assert!(found == events);
    }

    #[test]
    fn a_truncated_stream_says_less_and_nothing_else(
        events in events(),
        end in any::<usize>(),
        cuts in vec(any::<usize>(), 0..10),
    ) {
        let stream = write(&events);
        let (found, error) = read(&stream[..end % stream.len()], &cuts);
        prop_assert_eq!(error, None);
        prop_assert!(found.len() < events.len() && found[..] == events[..found.len()]);
    }

    #[test]
    fn a_damaged_stream_says_the_same_in_any_pieces(
        events in events(),
        damage in vec((any::<usize>(), 1..=255_u8), 1..4),
        cuts in vec(any::<usize>(), 0..40),
    ) {
        let mut stream = write(&events);
        // Most of a stream is content: half of the damage is aimed at its first bytes.
        for (index, (at, flip)) in damage.into_iter().enumerate() {
            let length = if index == 0 { stream.len().min(400) } else { stream.len() };
            stream[at % length] ^= flip;
        }
        prop_assert!(read(&stream, &cuts) == read(&stream, &[]));
    }

    #[test]
    fn any_bytes_after_the_prelude_are_answered(
        bytes in vec(any::<u8>(), 0..3000),
        head in prop_oneof![Just(0_usize), Just(40), Just(usize::MAX)],
        cuts in vec(any::<usize>(), 0..10),
    ) {
        let prelude = prelude().bytes;
        let mut stream = prelude[..head.min(prelude.len())].to_vec();
        stream.extend(bytes);
        prop_assert!(read(&stream, &cuts) == read(&stream, &[]));
    }

    #[test]
    fn a_return_path_in_any_pieces_says_what_was_written(
        messages in vec(message(), 0..8),
        cuts in vec(any::<usize>(), 0..20),
    ) {
        let mut stream = Vec::new();
        messages.iter().for_each(|message| message.write(&mut stream));
        prop_assert_eq!(read_back(&stream, &cuts), (messages, None));
    }

    #[test]
    fn a_damaged_return_path_is_answered(
        messages in vec(message(), 1..5),
        at in any::<usize>(),
        flip in 1..=255_u8,
        cuts in vec(any::<usize>(), 0..20),
    ) {
        let mut stream = Vec::new();
        messages.iter().for_each(|message| message.write(&mut stream));
        let at = at % stream.len();
        stream[at] ^= flip;
        prop_assert_eq!(read_back(&stream, &cuts), read_back(&stream, &[]));
        prop_assert_eq!(read_back(&stream[..at], &cuts).1, None);
    }
}

#[test]
fn what_exceeds_a_limit_is_refused() {
    let mut state = write(&[
        Event::Prelude(prelude()),
        Event::SectionStart { last: true },
        Event::SectionEnd,
    ]);
    state.extend(vec![1; LIMITS.device_state_bytes + 1]);
    let refused = |stream: &[u8]| match read(stream, &[]).1 {
        Some(ParseError::TooMuch { what, .. }) => what,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(&state), "bytes of device state");
    let blocks: Vec<RamBlock> = (0..9)
        .map(|index| RamBlock {
            name: format!("ram{index}"),
            used_bytes: 4096,
        })
        .collect();
    assert_eq!(refused(&Writer::prelude("pc", 1, &blocks)), "RAM blocks");
    let huge = RamBlock {
        name: "ram".to_owned(),
        used_bytes: 2 << 30,
    };
    let huge = Writer::prelude("pc", 1, &[huge]);
    assert_eq!(refused(&huge), "bytes in a RAM block");
    let mut commands = prelude().bytes[..8 + 5 + 11].to_vec();
    for _ in 0..1000 {
        commands.extend([8, 0, 2, 0, 4, 0, 0, 0, 1]);
    }
    assert_eq!(refused(&commands), "bytes before its first page");
    let bitmap = Message::ReceivedBitmap {
        block: "pc.ram".to_owned(),
        bitmap: vec![0; 70_000],
    };
    let mut back = Vec::new();
    bitmap.write(&mut back);
    assert_eq!(read_back(&back, &[]).1, Some(ReturnPathError::Bitmap));
}

#[test]
fn bytes_after_the_end_are_an_error() {
    let mut stream = write(&[
        Event::Prelude(prelude()),
        Event::SectionStart { last: true },
        Event::SectionEnd,
        Event::DeviceState(b"\0\x06\0\0\0\x08{\"a\":{}}".to_vec()),
    ]);
    assert_eq!(read(&stream, &[]).1, None);
    stream.push(0);
    let (events, error) = read(&stream, &[]);
    assert_eq!((events.len(), error), (4, Some(ParseError::AfterEnd)));
}
