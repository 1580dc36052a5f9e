//! Tests real streams of QEMU 7.2, 10.0 and 11.1 (see `golden/capture.py`): they are parsed, and
//! written again exactly.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use longhaul_qemu_stream::{Content, Event, Limits, PAGE_SIZE, Parser, Prelude, Writer};
use std::path::Path;

const CAPTURES: [(&str, &str); 6] = [
    ("7.2-q35", "pc-q35-7.2"),
    ("7.2-pc", "pc-i440fx-7.2"),
    ("10.0-q35", "pc-q35-10.0"),
    ("10.0-pc", "pc-i440fx-10.0"),
    ("11.1-q35", "pc-q35-11.1"),
    ("11.1-pc", "pc-i440fx-11.1"),
];

fn capture(name: &str) -> Vec<u8> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let packed = std::fs::read(folder.join(format!("{name}.stream.zst"))).unwrap();
    zstd::stream::decode_all(packed.as_slice()).unwrap()
}

/// Returns the events of a stream that arrives in pieces of `piece` bytes.
fn events(stream: &[u8], piece: usize, keep: impl Fn(&str) -> bool) -> (Vec<Event>, Parser) {
    let mut parser = Parser::new(Limits::default());
    let mut events = Vec::new();
    for mut input in stream.chunks(piece) {
        while let Some(event) = parser.next(&mut input).unwrap() {
            if let Event::Prelude(prelude) = &event {
                for (index, block) in prelude.blocks.iter().enumerate() {
                    if keep(&block.name) {
                        parser.keep(index);
                    }
                }
            }
            events.push(event);
        }
    }
    (events, parser)
}

fn prelude(events: &[Event]) -> Prelude {
    match events.first() {
        Some(Event::Prelude(prelude)) => prelude.clone(),
        other => panic!("first is {other:?}"),
    }
}

#[test]
fn captures_are_written_again_byte_by_byte() {
    for (name, machine_type) in CAPTURES {
        let stream = capture(name);
        let (events, parser) = events(&stream, stream.len(), |_| true);
        assert!(parser.is_complete(), "{name}");
        let prelude = prelude(&events);
        assert_eq!(prelude.machine_type, machine_type);
        let blocks = &prelude.blocks;
        assert_eq!(
            Writer::prelude(machine_type, prelude.ram_section, blocks),
            prelude.bytes
        );
        let mut writer = Writer::new(&prelude);
        let mut out = Vec::new();
        for event in &events {
            match event {
                Event::Prelude(prelude) => out.extend(&prelude.bytes),
                Event::SectionStart { last } => writer.section_start(*last, &mut out),
                Event::Page {
                    block,
                    page,
                    content,
                } => {
                    let content = match content {
                        Content::Zero => None,
                        Content::Kept(content) => Some(&**content),
                        Content::Skipped => panic!("every block is kept"),
                    };
                    assert!(writer.page(*block, *page, content, &mut out));
                }
                Event::SectionEnd => writer.section_end(&mut out),
                Event::Ping(value) => writer.ping(*value, &mut out),
                Event::SwitchoverStart => writer.switchover_start(&mut out),
                Event::DeviceState(bytes) => out.extend(bytes),
            }
        }
        assert!(out == stream, "{name}: not the same bytes");
    }
}

#[test]
fn captures_say_what_the_guest_wrote() {
    for (name, _) in CAPTURES {
        let stream = capture(name);
        let mut parser = Parser::new(Limits::default());
        let mut input = stream.as_slice();
        let mut blocks = Vec::new();
        let mut passes = Vec::<usize>::new();
        let mut switchovers = 0;
        while let Some(event) = parser.next(&mut input).unwrap() {
            match event {
                Event::Prelude(prelude) => blocks = prelude.blocks,
                Event::Page { block, page, .. } => {
                    assert!(page < blocks[block].pages());
                    passes.resize(parser.pass() as usize, 0);
                    *passes.last_mut().unwrap() += 1;
                }
                Event::SwitchoverStart => switchovers += 1,
                Event::DeviceState(bytes) => assert!(bytes.ends_with(b"}")),
                _ => {}
            }
        }
        assert_eq!(blocks[0].name, "pc.ram");
        assert_eq!(blocks[0].used_bytes, 4 << 20);
        assert_eq!(switchovers, usize::from(!name.starts_with("7.2")), "{name}");
        let total: u64 = blocks.iter().map(|block| block.pages()).sum();
        assert_eq!(
            passes[0] as u64, total,
            "{name}: the first pass has every page once"
        );
        assert!(passes.len() >= 3, "{name}: {passes:?}");
        assert!(passes[1..].iter().all(|pages| *pages <= 1000), "{passes:?}");
    }
}

/// With the capability `postcopy-ram` QEMU announces that it may end in post-copy; a destination
/// that gets the announcement needs the capability as well.
#[test]
fn an_announced_post_copy_is_left_out() {
    for (name, _) in CAPTURES {
        let stream = capture(name);
        let (plain, _) = events(&stream, stream.len(), |_| false);
        let ping = [8, 0, 2, 0, 4, 0, 0, 0, 1];
        let after = stream.windows(ping.len()).position(|at| at == ping);
        let after = after.unwrap() + ping.len();
        let announce = |page_bytes: u64| {
            let mut announced = stream[..after].to_vec();
            announced.extend([8, 0, 3, 0, 16]);
            announced.extend(page_bytes.to_be_bytes());
            announced.extend(4096_u64.to_be_bytes());
            announced.extend(&stream[after..]);
            announced
        };
        for piece in [1, PAGE_SIZE] {
            let (announced, _) = events(&announce(4096), piece, |_| false);
            assert!(announced == plain, "{name} in pieces of {piece}");
        }
        let huge = announce((2 << 20) | 4096);
        let mut parser = Parser::new(Limits::default());
        let error = parser.next(&mut huge.as_slice()).unwrap_err().to_string();
        assert!(error.contains("postcopy-ram with huge pages"), "{error}");
    }
}

#[test]
fn pieces_of_any_size_say_the_same() {
    for (name, _) in CAPTURES {
        let stream = capture(name);
        let small = |block: &str| block != "pc.ram";
        let (whole, _) = events(&stream, stream.len(), small);
        for piece in [1, 7, 255, PAGE_SIZE, 65537] {
            let (pieces, parser) = events(&stream, piece, small);
            assert!(parser.is_complete());
            assert!(pieces == whole, "{name} in pieces of {piece}");
        }
    }
}

#[test]
fn what_cannot_be_moved_is_refused_by_name() {
    let stream = capture("10.0-q35");
    let (events, _) = events(&stream, stream.len(), |_| false);
    let setup = prelude(&events).bytes;
    let mut input = setup.as_slice();
    let mut parser = Parser::new(Limits::default());
    assert!(parser.next(&mut input).unwrap().is_some());
    // SECTION_START and SECTION_FULL, id 9, instance 0, version 1.
    for mark in [1, 4] {
        let mut head = vec![mark, 0, 0, 0, 9, 4];
        head.extend(b"vfio\0\0\0\0\0\0\0\x01");
        for position in [setup.len(), 8 + 5 + "pc-q35-10.0".len()] {
            let mut bytes = setup[..position].to_vec();
            bytes.extend(&head);
            let mut parser = Parser::new(Limits::default());
            let mut input = bytes.as_slice();
            let error = loop {
                match parser.next(&mut input) {
                    Ok(event) => assert!(event.is_some(), "not refused"),
                    Err(error) => break error,
                }
            };
            assert!(error.to_string().contains("`vfio`"), "{error}");
        }
    }
}
