//! Tests that nothing gets into a network that does not belong there.

use crate::traffic::transfer;
use crate::world::*;
use longhaul_network::plane::PlaneEvent;
use longhaul_overlay::Rate;
use longhaul_overlay::seal::Suite;
use longhaul_overlay::switch::{PortConfig, Reason};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

#[test]
fn networks_with_the_same_addresses_do_not_mix() {
    if !is_root() {
        return;
    }
    let mut world = World::new(Setup::default());
    world.open_all(BLUE, 1500);
    world.open_all(RED, 1500);
    let pairs = [BLUE, RED].map(|network| {
        let pair = (world.station(0, network, 1), world.station(1, network, 2));
        (network, pair)
    });
    // Both servers have the same address, and say who they are.
    let listeners = pairs.each_ref().map(|(_, (_, server))| {
        let listener = server.enter(|| TcpListener::bind("10.0.0.2:80")).unwrap();
        listener.unwrap()
    });
    for ((network, (client, _)), listener) in pairs.iter().zip(&listeners) {
        ping(client, "10.0.0.2");
        let stream = client.enter(|| TcpStream::connect("10.0.0.2:80")).unwrap();
        let mut server = listener.accept().unwrap().0;
        server.write_all(&network.0.to_le_bytes()).unwrap();
        let mut said = [0; 8];
        stream.unwrap().read_exact(&mut said).unwrap();
        assert_eq!(u64::from_le_bytes(said), network.0);
    }
    for (_, (client, server)) in &pairs {
        transfer(client, server, "10.0.0.2");
    }
    let cards = [(0, BLUE), (0, RED), (1, BLUE), (1, RED)]
        .map(|(host, network)| world.card(host, network, &format!("c{:x}", network.0 & 0xff)));
    let [blue, red, other_blue, other_red] = cards;
    blue.reaches(&frame(ALL, mac(1), None, "blue"), &other_blue);
    red.send(&frame(ALL, mac(1), None, "red"));
    let got = other_red.until("a red frame", |got| *got == frame(ALL, mac(1), None, "red"));
    let blue = frame(ALL, mac(1), None, "blue");
    assert!(got.iter().all(|frame| *frame != blue));
}

#[test]
fn a_member_of_one_network_gets_nothing_into_another() {
    if !is_root() {
        return;
    }
    let mut world = World::new(Setup {
        hosts: 3,
        ..Setup::default()
    });
    world.open_all(BLUE, 1500);
    // The third host takes itself for a member of red.
    world.open(2, &world.network(RED, 1500));
    let mut red = world.network(RED, 1500);
    red.members.truncate(2);
    world.open(0, &red);
    world.open(1, &red);
    let cards = [0, 1, 2].map(|host| world.card(host, RED, "red"));
    let [a, b, intruder] = &cards;
    b.reaches(&frame(ALL, mac(1), None, "begin"), a);
    intruder.send(&frame(ALL, mac(3), None, "let me in"));
    // A frame that needs fragments, and one that is known to go there.
    intruder.send(&frame(ALL, mac(3), None, &"let me in ".repeat(150)));
    intruder.send(&frame(mac(1), mac(3), None, "let me in"));
    let foreign = |world: &World, host: usize| {
        let status = world.hosts[host].plane.status();
        status.counters.foreign
    };
    // Two datagrams, and two of the fragments.
    eventually("all are refused", || foreign(&world, 0) >= 4);
    b.send(&frame(ALL, mac(1), None, "end"));
    let got = a.until("the end", |got| *got == frame(ALL, mac(1), None, "end"));
    assert!(got.iter().all(|frame| frame[6..12] != mac(3)));
    let is = |event: &PlaneEvent| {
        *event
            == PlaneEvent::Foreign {
                peer: id(2),
                network: RED,
            }
    };
    world.hosts[0].event("the intruder is reported", is);
    // Nor can it announce guests there, or learn anything.
    let pinned = longhaul_overlay::Mac(mac(4));
    let refused = foreign(&world, 0);
    world.hosts[2].plane.pin(RED, pinned, 9).unwrap();
    assert!(world.hosts[2].plane.announce(RED, pinned).unwrap());
    eventually("it is refused", || foreign(&world, 0) > refused);
    assert_eq!(world.network_status(0, RED).switch.told, 0);
    let received = world.network_status(2, RED).device.written;
    assert_eq!(received, 0, "nothing of red was sent there");
    // As a member it is heard, and then not any more.
    let host = &world.hosts[0].plane;
    host.set_members(RED, &world.members()).unwrap();
    intruder.reaches(&frame(ALL, mac(3), None, "as a member"), a);
    host.set_members(RED, &red.members).unwrap();
    let refused = foreign(&world, 0);
    intruder.send(&frame(ALL, mac(3), None, "no member"));
    eventually("it is refused again", || foreign(&world, 0) > refused);
    b.send(&frame(ALL, mac(1), None, "again"));
    let got = a.until("the end", |got| *got == frame(ALL, mac(1), None, "again"));
    assert!(
        got.iter()
            .all(|got| *got != frame(ALL, mac(3), None, "no member"))
    );
}

#[test]
fn replayed_forged_and_foreign_datagrams_change_nothing() {
    if !is_root() {
        return;
    }
    let mut setup = Setup {
        hosts: 3,
        ..Setup::default()
    };
    setup.config.session.roaming = true;
    let world = World::blue(setup);
    let cards = [0, 1].map(|host| world.card(host, BLUE, "card"));
    let [a, b] = &cards;
    a.reaches(&frame(ALL, mac(1), None, "begin"), b);
    *world.hosts[0].udp.tapped.lock().unwrap() = Some(Vec::new());
    for number in 0..20 {
        a.send(&frame(ALL, mac(1), None, &format!("frame {number}")));
    }
    let last = frame(ALL, mac(1), None, "frame 19");
    b.until("the last frame", |frame| *frame == last);
    let tapped = world.hosts[0].udp.tapped.lock().unwrap().take();
    let to = world.hosts[1].address;
    let tapped = tapped.unwrap().into_iter();
    let tapped: Vec<Vec<u8>> = tapped
        .filter_map(|(address, datagram)| (address == to).then_some(datagram))
        .collect();
    let before = world.peer_status(1, 0);
    let unknown = world.hosts[1].plane.status().counters.unknown_keys;
    // The same again, from the same address and from another one.
    for host in [0, 2] {
        for datagram in &tapped {
            world.hosts[host].udp.send_raw(to, datagram);
        }
    }
    // One bit of each is another one: in the header, the payload or the tag.
    for (number, datagram) in tapped.iter().enumerate() {
        for at in [
            number % 8 + 8,
            24 + number,
            datagram.len() - 1 - number % 16,
        ] {
            let mut forged = datagram.clone();
            forged[at] ^= 1 << (number % 8);
            world.hosts[2].udp.send_raw(to, &forged);
        }
        let mut other_keys = datagram.clone();
        other_keys[4] ^= 0x55;
        world.hosts[2].udp.send_raw(to, &other_keys);
        world.hosts[2].udp.send_raw(to, &datagram[..39]);
    }
    let count = tapped.len() as u64;
    assert!(count >= 20);
    eventually("all are refused", || {
        let opened = world.peer_status(1, 0).session.opened;
        let refused = |after: u64, before: u64| after - before;
        let replayed = refused(opened.replayed, before.session.opened.replayed);
        let forged = refused(opened.forged, before.session.opened.forged);
        // Counters that were changed may be too old or too new.
        let others = opened.old + opened.epoch;
        let status = world.hosts[1].plane.status();
        replayed >= 2 * count
            && replayed + forged + others >= 5 * count
            && status.counters.unknown_keys - unknown >= 2 * count
    });
    a.send(&frame(ALL, mac(1), None, "end"));
    let got = b.until("the end", |got| *got == frame(ALL, mac(1), None, "end"));
    let again = got.iter().filter(|got| got[6..12] == mac(1)).count();
    assert_eq!(again, 1, "only the last frame arrives");
    let after = world.peer_status(1, 0);
    assert_eq!(after.way, before.way, "the way is the same");
    assert_eq!(after.session.roamed, before.session.roamed);
    b.reaches(&frame(ALL, mac(2), None, "back"), a);
}

#[test]
fn keys_of_another_connection_open_nothing() {
    if !is_root() {
        return;
    }
    let world = World::blue(Setup::default());
    let cards = [0, 1].map(|host| world.card(host, BLUE, "card"));
    cards[0].reaches(&frame(ALL, mac(1), None, "begin"), &cards[1]);
    // One end alone has other keys: the dialler waits a second, and is not understood then.
    world.connect(0, 1, 7, Suite::Aes256Gcm);
    let unknown = || world.hosts[1].plane.status().counters.unknown_keys;
    let before = unknown();
    eventually("it is not understood", || {
        cards[0].send(&frame(ALL, mac(1), None, "under other keys"));
        unknown() > before
    });
    world.connect(1, 0, 7, Suite::Aes256Gcm);
    cards[0].reaches(&frame(ALL, mac(1), None, "again"), &cards[1]);
    // The same keys twice are refused: their counters would be used twice.
    let again = world.hosts[0].plane.connected(
        id(1),
        &secret(0, 1, 7),
        longhaul_overlay::seal::Side::Dialler,
        Suite::Aes256Gcm,
    );
    assert!(again.is_err());
}

#[test]
fn floods_are_limited() {
    if !is_root() {
        return;
    }
    let mut setup = Setup::default();
    setup.config.local_port = PortConfig {
        flood: Rate {
            per_second: 0,
            burst: 30,
        },
        ..PortConfig::LOCAL
    };
    let mut world = World::blue(setup);
    let (a, b) = (world.card(0, BLUE, "card"), world.card(1, BLUE, "card"));
    b.reaches(&frame(ALL, mac(2), None, "begin"), &a);
    for number in 0..200 {
        a.send(&frame(ALL, mac(1), None, &format!("{number}")));
    }
    a.send(&frame(mac(2), mac(1), None, "to one"));
    let got = b.until("the last frame", |got| got[..6] == mac(2));
    let flooded = got.iter().filter(|got| got[6..12] == mac(1)).count() - 1;
    assert!((1..=30).contains(&flooded), "{flooded}");
    let status = world.network_status(0, BLUE);
    assert!(status.switch.not_forwarded(Reason::FloodLimit) >= 170);
    let mut events = Vec::new();
    while let Ok(event) = world.hosts[0].outputs.events.try_recv() {
        events.push(event);
    }
    let limited = |event: &&PlaneEvent| matches!(event, PlaneEvent::FloodLimited { .. });
    assert_eq!(events.iter().filter(limited).count(), 1, "{events:?}");
}
