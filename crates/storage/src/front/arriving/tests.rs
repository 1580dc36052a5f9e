//! Tests an arriving disk with a guest and a pump of the test's own.

use super::disk::{ArrivingDisk, keep_durable};
use super::line::{MESSAGE_BYTES, ToPump, ToServer};
use super::masks::{Masks, is_marked_failed, mark_failed};
use super::pump::listen;
use super::unwritten::{self, Unwritten};
use crate::disk::{Disk, ExportSize, Zeros};
use crate::front::{FrontFolder, FrontSpec};
use crate::nbd::connection::{ConnectionError, HangUp, transmit};
use crate::nbd::handshake::Session;
use crate::nbd::{ExportName, Notice};
use longhaul_engine::remaining::Remaining;
use longhaul_protocol::{BLOCK_SIZE, BlockRange, RegionId};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

const BLOCK: u64 = BLOCK_SIZE as u64;
const BLOCKS: u64 = 256;
const PATIENCE: Duration = Duration::from_secs(60);

struct Fixture {
    folder: FrontFolder,
    spec: FrontSpec,
    disk: Arc<ArrivingDisk>,
    _root: tempfile::TempDir,
}

struct TestPump(UnixStream);

impl Fixture {
    /// The first 8 blocks of the first chunk are missing.
    fn new() -> Self {
        Self::shown(ExportSize::OfFile)
    }

    fn shown(size: ExportSize) -> Self {
        let root = tempfile::tempdir().unwrap();
        let image = root.path().join("image");
        File::create(&image)
            .unwrap()
            .set_len(BLOCKS * BLOCK)
            .unwrap();
        let spec = FrontSpec {
            image,
            size,
            locks: None,
            name: ExportName::new("0123456789abcdef".repeat(2)).unwrap(),
            qemu_uid: None,
            arriving: true,
            tracked: false,
            fetched: None,
            socket: None,
        };
        let folder = FrontFolder::create(&root.path().join("f"), &spec).unwrap();
        let disk = Self::start(&folder, &spec);
        Self {
            folder,
            spec,
            disk,
            _root: root,
        }
    }

    fn start(folder: &FrontFolder, spec: &FrontSpec) -> Arc<ArrivingDisk> {
        let disk = ArrivingDisk::open(folder, spec, |notice| panic!("{notice}"));
        let disk = Arc::new(disk.unwrap());
        keep_durable(&disk).unwrap();
        listen(folder, &disk).unwrap();
        disk
    }

    /// Replaces the server by another one.
    fn restart(&mut self) {
        self.disk = Self::start(&self.folder, &self.spec);
    }

    fn pump(&self) -> TestPump {
        let stream = UnixStream::connect(self.folder.pump()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        TestPump(stream)
    }

    fn list(&self) -> TestPump {
        self.lacks(0, 0xff)
    }

    fn lacks(&self, chunk: u32, mask: u64) -> TestPump {
        let missing = Remaining {
            chunk,
            chunks: 1,
            mask,
            written_blocks: 1,
        };
        let masks = Masks {
            region: RegionId(2),
            blocks: BLOCKS,
            boot: [0; 16],
            missing: vec![missing],
        };
        masks.write(&self.folder.stored_masks()).unwrap();
        let mut pump = self.pump();
        pump.say(ToServer::Listed, &[]);
        pump.barrier();
        pump
    }
}

impl TestPump {
    fn say(&mut self, message: ToServer, content: &[u8]) {
        self.0.write_all(&message.to_bytes()).unwrap();
        self.0.write_all(content).unwrap();
    }

    fn heard(&mut self) -> ToPump {
        let mut bytes = [0; MESSAGE_BYTES];
        self.0.read_exact(&mut bytes).unwrap();
        ToPump::from_bytes(&bytes).unwrap()
    }

    /// Waits for a message, ignoring all others.
    fn wait_for(&mut self, message: ToPump) {
        while self.heard() != message {}
    }

    fn barrier(&mut self) {
        self.say(ToServer::Barrier(7), &[]);
        self.wait_for(ToPump::Reached(7));
    }

    fn bring(&mut self, range: BlockRange, byte: u8) {
        let content = vec![byte; (range.count * BLOCK) as usize];
        self.say(ToServer::Blocks(range), &content);
    }
}

/// Simulates a restart of the machine.
fn forget_boot(fixture: &Fixture) {
    let noted = fixture.folder.noted_masks();
    let mut bytes = fs::read(&noted).unwrap();
    bytes[24] ^= 1;
    fs::write(&noted, bytes).unwrap();
}

fn read(disk: &ArrivingDisk, block: u64) -> u8 {
    let mut byte = [0];
    disk.read(block * BLOCK, &mut byte).unwrap();
    byte[0]
}

#[test]
fn who_needs_what_is_missing_waits_for_it_and_nobody_else() {
    let fixture = Fixture::new();
    let mut pump = fixture.list();
    let disk = &fixture.disk;
    thread::scope(|scope| {
        let reading = scope.spawn(|| read(disk, 3));
        pump.wait_for(ToPump::Want(BlockRange::new(3, 1)));
        // Present blocks are read, and a write of a whole block needs nothing.
        assert_eq!(read(disk, 100), 0);
        disk.write(0, &[5; BLOCK_SIZE]).unwrap();
        pump.wait_for(ToPump::Superseded(BlockRange::new(0, 1)));
        let part = scope.spawn(|| disk.write(4 * BLOCK + 10, &[6; 10]));
        pump.wait_for(ToPump::Want(BlockRange::new(4, 1)));
        assert!(!reading.is_finished() && !part.is_finished());
        pump.bring(BlockRange::new(0, 8), 9);
        assert_eq!(reading.join().unwrap(), 9);
        part.join().unwrap().unwrap();
    });
    assert_eq!([0, 1, 4].map(|block| read(disk, block)), [5, 9, 9]);
    let mut bytes = [0; 30];
    disk.read(4 * BLOCK, &mut bytes).unwrap();
    assert_eq!(bytes[..10], [9; 10]);
    assert_eq!(bytes[10..20], [6; 10]);
    assert_eq!(bytes[20..], [9; 10]);
    pump.wait_for(ToPump::Whole);
    disk.discard(BLOCK + 512..2 * BLOCK + 512).unwrap();
    assert_eq!([1, 2, 3].map(|block| read(disk, block)), [9, 0, 9]);
    let mut bytes = [1; 1024];
    disk.read(2 * BLOCK, &mut bytes).unwrap();
    assert_eq!((bytes[511], bytes[512]), (0, 9));
    disk.flush().unwrap();
    let stored = Masks::read(&fixture.folder.stored_masks())
        .unwrap()
        .unwrap();
    assert_eq!(stored.missing, []);
}

#[test]
fn the_next_server_knows_what_the_last_one_answered_and_after_a_power_cut_what_is_durable() {
    let mut fixture = Fixture::new();
    let mut pump = fixture.list();
    fixture.disk.write(0, &[5; BLOCK_SIZE]).unwrap();
    pump.bring(BlockRange::new(1, 1), 9);
    pump.barrier();
    fixture.restart();
    let mut pump = fixture.pump();
    let state = ToPump::State {
        missing_blocks: 6,
        waiting: 0,
    };
    assert_eq!(pump.heard(), state);
    // Locally written blocks are not overwritten.
    pump.bring(BlockRange::new(0, 2), 7);
    pump.barrier();
    assert_eq!([0, 1].map(|block| read(&fixture.disk, block)), [5, 9]);
    fixture.disk.flush().unwrap();
    fixture
        .disk
        .zero(2 * BLOCK..3 * BLOCK, Zeros::MayBeHole)
        .unwrap();
    forget_boot(&fixture);
    let stored = Masks::read(&fixture.folder.stored_masks())
        .unwrap()
        .unwrap();
    fixture.restart();
    let mut pump = fixture.pump();
    let ToPump::State { missing_blocks, .. } = pump.heard() else {
        panic!("the state comes first");
    };
    assert_eq!(missing_blocks, stored.missing_blocks());
    assert!(missing_blocks <= 6);
}

#[test]
fn a_disk_that_could_not_be_made_durable_is_whole_only_after_the_host_was_started_anew() {
    let mut fixture = Fixture::new();
    drop(fixture.list());
    mark_failed(&fixture.folder.failed_mark()).unwrap();
    // The system reports lost data once: the next server has not received that report.
    fixture.restart();
    let mut pump = fixture.pump();
    pump.wait_for(ToPump::Broken(nix::libc::EIO));
    pump.bring(BlockRange::new(0, 8), 9);
    pump.barrier();
    assert_eq!(read(&fixture.disk, 3), 9);
    let error = fixture.disk.flush().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(nix::libc::EIO));
    let stored = Masks::read(&fixture.folder.stored_masks());
    assert_eq!(stored.unwrap().unwrap().missing_blocks(), 8);
    // A record of another boot is meaningless, and only durable masks count.
    fs::write(fixture.folder.failed_mark(), [0; 16]).unwrap();
    forget_boot(&fixture);
    fixture.restart();
    let mut pump = fixture.pump();
    pump.bring(BlockRange::new(0, 8), 7);
    pump.wait_for(ToPump::Whole);
    assert_eq!(read(&fixture.disk, 3), 7);
}

#[test]
fn that_a_disk_failed_is_noted_as_soon_as_it_can_be_and_told_once_before() {
    let fixture = Fixture::new();
    let mark = fixture.folder.failed_mark();
    // The mark is first written under this name.
    let in_the_way = mark.with_extension("new");
    fs::create_dir(&in_the_way).unwrap();
    let (notify, notices) = channel();
    let notify = move |notice: Notice| notify.send(notice.to_string()).unwrap();
    let disk = ArrivingDisk::open(&fixture.folder, &fixture.spec, notify).unwrap();
    thread::scope(|scope| {
        let marks = scope.spawn(|| disk.mark_failed());
        let told = notices.recv_timeout(PATIENCE).unwrap();
        assert!(told.contains(mark.to_str().unwrap()), "{told}");
        // It is repeated several times.
        let again = notices.recv_timeout(Duration::from_secs(1));
        assert!(again.is_err(), "{again:?}");
        assert!(!marks.is_finished() && !is_marked_failed(&mark).unwrap());
        fs::remove_dir(&in_the_way).unwrap();
    });
    assert!(is_marked_failed(&mark).unwrap());
}

#[test]
fn what_the_source_cannot_read_is_an_error_for_who_needs_it() {
    let fixture = Fixture::new();
    let mut pump = fixture.list();
    let disk = &fixture.disk;
    thread::scope(|scope| {
        let refused = scope.spawn(|| disk.read(2 * BLOCK, &mut [0; 512]));
        pump.wait_for(ToPump::Want(BlockRange::new(2, 1)));
        pump.say(ToServer::Unreadable(BlockRange::new(2, 1)), &[]);
        let error = refused.join().unwrap().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(nix::libc::EIO));
    });
    disk.write(2 * BLOCK, &[4; BLOCK_SIZE]).unwrap();
    assert_eq!(read(disk, 2), 4);
    pump.say(ToServer::Zeros(BlockRange::new(0, 8)), &[]);
    pump.wait_for(ToPump::Whole);
    assert_eq!([1, 2].map(|block| read(disk, block)), [0, 4]);
}

#[test]
fn nobody_writes_before_the_list_and_what_breaks_the_line_changes_nothing() {
    let fixture = Fixture::new();
    let disk = fixture.disk.clone();
    assert_eq!(read(&disk, 0), 0);
    disk.flush().unwrap();
    let mut early = fixture.pump();
    early.say(ToServer::Listed, &[]);
    assert_eq!(early.0.read(&mut [0; 1]).unwrap(), 0, "there are no masks");
    let writer = disk.clone();
    let writing = thread::spawn(move || writer.write(0, &[3; BLOCK_SIZE]));
    let mut pump = fixture.list();
    writing.join().unwrap().unwrap();
    assert_eq!(read(&disk, 0), 3);
    pump.0.write_all(&[0xff; MESSAGE_BYTES]).unwrap();
    let mut rest = Vec::new();
    pump.0.read_to_end(&mut rest).unwrap();
    let mut pump = fixture.pump();
    pump.bring(BlockRange::new(1, 7), 8);
    pump.wait_for(ToPump::Whole);
}

/// A client of the disk that speaks NBD without a handshake.
struct Client {
    stream: UnixStream,
    serving: thread::JoinHandle<Result<(), ConnectionError>>,
}

impl Client {
    /// Connects; its connection is hung up after this time if it may withhold a reply.
    fn new(fixture: &Fixture, after: Duration) -> Self {
        let (stream, server) = UnixStream::pair().unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let disk = fixture.disk.clone();
        let serving = thread::spawn(move || {
            let session = Session {
                export: 0,
                structured: false,
                allocation: false,
            };
            let closing = server.try_clone().unwrap();
            let hang_up = HangUp {
                after,
                close: Box::new(move || closing.shutdown(Shutdown::Both).unwrap()),
            };
            let (mut reader, mut writer) = (&server, &server);
            transmit(&mut reader, &mut writer, &*disk, session, &|_| (), hang_up)
        });
        Self { stream, serving }
    }

    fn ask(&mut self, command: u16, cookie: u64, offset: u64, payload: &[u8]) {
        let mut bytes = 0x2560_9513_u32.to_be_bytes().to_vec();
        bytes.extend(0_u16.to_be_bytes());
        bytes.extend(command.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes.extend(offset.to_be_bytes());
        bytes.extend(512_u32.to_be_bytes());
        bytes.extend(payload);
        // On a busy machine it is hung up already.
        let _ = self.stream.write_all(&bytes);
    }

    fn read(&mut self, cookie: u64, block: u64) {
        self.ask(0, cookie, block * BLOCK, &[]);
    }

    fn write(&mut self, cookie: u64, block: u64) {
        self.ask(1, cookie, block * BLOCK, &[1; 512]);
    }

    /// Returns which write was done.
    fn written(&mut self) -> u8 {
        let mut reply = [0; 16];
        self.stream.read_exact(&mut reply).unwrap();
        assert_eq!(reply[4..8], [0; 4]);
        reply[15]
    }

    /// Returns which read was done, and the first byte of the content.
    fn content(&mut self) -> (u8, u8) {
        let cookie = self.written();
        let mut payload = [0; 512];
        self.stream.read_exact(&mut payload).unwrap();
        (cookie, payload[0])
    }
}

#[test]
fn a_request_that_waits_does_not_hold_up_those_behind_it_nor_outlives_its_client() {
    let fixture = Fixture::new();
    let mut pump = fixture.list();
    let mut client = Client::new(&fixture, Duration::MAX);
    client.read(1, 5);
    client.read(2, 99);
    assert_eq!(client.content(), (2, 0));
    pump.bring(BlockRange::new(5, 1), 4);
    assert_eq!(client.content(), (1, 4));
    // A write of a part of a block, which waits; then its client disconnects.
    client.write(3, 6);
    pump.wait_for(ToPump::Want(BlockRange::new(6, 1)));
    drop(client.stream);
    client.serving.join().unwrap().unwrap();
    pump.bring(BlockRange::new(6, 1), 2);
    pump.barrier();
    assert_eq!(read(&fixture.disk, 6), 2);
}

#[test]
fn a_client_that_may_keep_an_answer_back_is_hung_up_and_says_again_what_waited() {
    let fixture = Fixture::new();
    let mut pump = fixture.list();
    let mut client = Client::new(&fixture, Duration::ZERO);
    // No reply can be withheld: none was sent while a request waited.
    client.read(1, 99);
    assert_eq!(client.content(), (1, 0));
    client.write(2, 5);
    pump.wait_for(ToPump::Want(BlockRange::new(5, 1)));
    pump.bring(BlockRange::new(5, 1), 4);
    assert_eq!(client.written(), 2);
    // Now one can.
    client.write(3, 6);
    pump.wait_for(ToPump::Want(BlockRange::new(6, 1)));
    client.read(4, 99);
    assert_eq!(client.content(), (4, 0));
    let mut rest = Vec::new();
    client.stream.read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty(), "what waited was not answered");
    client.serving.join().unwrap().unwrap();

    let mut again = Client::new(&fixture, Duration::ZERO);
    again.write(3, 6);
    pump.bring(BlockRange::new(6, 1), 2);
    assert_eq!(again.written(), 3);
    assert_eq!(read(&fixture.disk, 6), 1);
}

#[test]
fn what_the_guest_has_not_written_is_known_as_long_as_the_host_runs() {
    let mut fixture = Fixture::new();
    let folder = fixture.folder.clone();
    let open = || Unwritten::open(&folder, BLOCKS).unwrap();
    assert!(open().is_none(), "nothing is to be compared");
    unwritten::begin(&folder, RegionId(2), BLOCKS).unwrap();
    let mut pump = fixture.list();
    let all = BlockRange::new(0, BLOCKS);
    let written = |blocks_per_piece: u64| {
        let pieces = open().unwrap().pieces(all, blocks_per_piece).unwrap();
        let pieces = pieces.iter().enumerate();
        pieces
            .filter_map(|(n, unwritten)| (!unwritten).then_some(n))
            .collect::<Vec<_>>()
    };
    // Arriving and read blocks do not count as written; zeroed and discarded ones do.
    pump.bring(BlockRange::new(0, 4), 9);
    pump.barrier();
    assert_eq!(read(&fixture.disk, 3), 9);
    assert!(written(1).is_empty());
    fixture.disk.write(0, &[5; BLOCK_SIZE]).unwrap();
    fixture.disk.write(66 * BLOCK - 1, &[5; 2]).unwrap();
    fixture
        .disk
        .zero(70 * BLOCK..71 * BLOCK, Zeros::MayBeHole)
        .unwrap();
    assert_eq!(written(1), [0, 65, 66, 70]);
    fixture.restart();
    fixture.disk.discard(200 * BLOCK..201 * BLOCK).unwrap();
    fixture.disk.write(0, &[6; BLOCK_SIZE]).unwrap();
    assert_eq!(written(1), [0, 65, 66, 70, 200]);
    assert_eq!(written(64), [0, 1, 3]);
    let end = open().unwrap().pieces(BlockRange::new(190, 40), 10);
    assert_eq!(end.unwrap(), [true, false, true, true]);
    let beyond = open().unwrap().pieces(BlockRange::new(BLOCKS - 1, 2), 1);
    assert_eq!(beyond.unwrap(), [false, false]);
    // After that it is unknown.
    let path = folder.unwritten_masks();
    let mut bytes = fs::read(&path).unwrap();
    bytes[24] ^= 1;
    fs::write(&path, bytes).unwrap();
    fixture.restart();
    fixture.disk.write(100 * BLOCK, &[7; BLOCK_SIZE]).unwrap();
    assert_eq!(written(64), [0, 1, 2, 3]);
    unwritten::end(&folder).unwrap();
    unwritten::end(&folder).unwrap();
    assert!(open().is_none());
}

#[test]
fn behind_what_the_source_has_of_an_image_that_grows_there_is_room() {
    let fixture = Fixture::shown(ExportSize::Bytes(1 << 60));
    let end = BLOCKS * BLOCK;
    // Before the list the image can be opened from its present blocks, and nothing lies behind
    // them.
    let mut read = vec![1; 2 * BLOCK_SIZE];
    fixture.disk.read(end - BLOCK, &mut read).unwrap();
    assert!(read.iter().all(|byte| *byte == 0));
    // The disk's last block is missing.
    let mut pump = fixture.lacks(3, 1 << 63);
    let disk = fixture.disk.clone();
    let reader = thread::spawn(move || {
        let mut read = vec![1; 3 * BLOCK_SIZE];
        disk.read(end - 2 * BLOCK, &mut read).map(|()| read)
    });
    let last = BlockRange::new(BLOCKS - 1, 1);
    pump.wait_for(ToPump::Want(last));
    // A write behind it waits for nothing.
    fixture.disk.write(end + 5, &[9; 100]).unwrap();
    pump.bring(last, 7);
    let read = reader.join().unwrap().unwrap();
    let (here, behind) = read.split_at(2 * BLOCK_SIZE);
    assert!(here[..BLOCK_SIZE].iter().all(|byte| *byte == 0));
    assert!(here[BLOCK_SIZE..].iter().all(|byte| *byte == 7));
    let zeros = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 0);
    assert!(behind[5..105].iter().all(|byte| *byte == 9));
    assert!(zeros(&behind[..5]));
    // Across the end, and far behind it.
    fixture.disk.write(end - 10, &[3; 20]).unwrap();
    fixture.disk.write(1 << 40, &[4; 20]).unwrap();
    let mut read = [0; 20];
    fixture.disk.read(end - 10, &mut read).unwrap();
    assert_eq!(read, [3; 20]);
    fixture
        .disk
        .zero(end - 5..end + 5, Zeros::MayBeHole)
        .unwrap();
    fixture.disk.read(end - 10, &mut read).unwrap();
    assert_eq!(
        (&read[..5], &read[5..15], &read[15..]),
        (&[3; 5][..], &[0; 10][..], &[3; 5][..])
    );
    fixture.disk.discard(end + BLOCK..end + 4 * BLOCK).unwrap();
    pump.wait_for(ToPump::Whole);
    fixture.disk.flush().unwrap();
    let image = fs::metadata(&fixture.spec.image).unwrap();
    assert_eq!(image.len(), (1 << 40) + 20);
    assert!(fixture.disk.write(1 << 60, &[1]).is_err());
}
